"""How transitions end: at the new layout, as before they began, or at the higher degree with an empty cache."""

from collections.abc import Callable

from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.transform.call import GroupTransition
from amoeba_jax.transform.lanes import adopt_prefixes, move_into, pages_at
from amoeba_jax.transform.pausing import give_hidden
from kvcache.pages import PagePool, SequencePages
from sharding.placement import Placement


class Ending:
    """Ends transitions. Used by the dispatcher thread only.

    Args:
        requeue: takes a sequence off its instance, to be computed again.
    """

    def __init__(self, cluster: Cluster, requeue: Callable[[Instance, Sequence], None]):
        self._cluster, self._requeue = cluster, requeue

    def settle_high(self, instance: Instance, pool: PagePool) -> None:
        """Have an instance of the higher degree be as in steady state, with the pages that its lanes have there."""
        home, group = instance.group.home, (instance.group.home,) * len(instance.lanes)
        lane = self._cluster.factory.new_lane(pool, instance.group)
        for sequence, own in move_into(lane, instance.lanes, group):
            sequence.pages = own
            lane.running.append(sequence)
        instance.lanes, instance.lane_buckets, instance.transition = [lane], instance.buckets, None
        instance.runner.sites = {home: instance.site}
        instance.runner.place(Placement.uniform(home, self._cluster.dims.config.num_layers))
        if instance.paused:
            instance.take_the_place_of(instance.paused)

    def settle_low(self, active: GroupTransition) -> None:
        """Have instances of the lower degree, those that were paused if there are, take over what they have there."""
        cluster, transition, instance = self._cluster, active.transition, active.transition.instance
        tp, released = transition.programs.lower, transition.programs.released[1]
        scratch = cluster.factory.scratch_of(instance).split(tp)
        new, views = list(instance.paused), []
        for index, (site, lane) in enumerate(zip(transition.members, instance.lanes, strict=True)):
            if not instance.paused:
                allocators = cluster.factory.allocators_of(site.group)
                new.append(cluster.factory.new_instance(site.group, allocators, site.kv, released, scratch[index]))
            own = new[index].lane
            views += [(new[index], own, *pages) for pages in pages_at(own.pages, [lane], transition.low_group)]
        hand_over([instance], views, self._requeue)  # may fail: nothing has changed until then
        if active.kept is not None:
            active.kept.settle()
        cluster.factory.settle_allocators(instance.group, active.allocators)
        for home, lane in zip(new, instance.lanes, strict=True):
            adopt_prefixes(home.lane, [lane], transition.low_group)
        if members := instance.drop_paused():
            give_hidden(members, [buffer for part in scratch for buffer in part.hidden])
        for member, site in zip(members, transition.members, strict=False):
            member.site.kv[:] = site.kv
        cluster.replace([instance], new)

    def abort(self, active: GroupTransition) -> None:
        """Before the point of no return: nothing has moved and no step has run, and the layout to come is dropped."""
        cluster, transition = self._cluster, active.transition
        instance = transition.instance
        if not transition.up:
            allocators = cluster.factory.allocators_of(instance.group)
            self.settle_high(instance, PagePool(cluster.dims.pages, allocators, instance.tp))
            return
        instance.transition = None
        instance.sampler.state.replace_lost()  # taking the sequences back writes their rows again
        scratch = cluster.factory.scratch_of(instance).split(transition.programs.lower)
        old, views = [], []
        for index, (before, site, lane) in enumerate(zip(active.old, transition.members, instance.lanes, strict=True)):
            allocators = cluster.factory.allocators_of(site.group)
            old.append(cluster.factory.new_instance(site.group, allocators, site.kv, before.released, scratch[index]))
            views += [(old[-1], old[-1].lane, *own) for own in move_into(old[-1].lane, [lane], transition.low_group)]
        for lane in instance.lanes:
            lane.running = []
        for new, lane, sequence, pages in views:
            sequence.pages = pages
            new.add(sequence, lane)
        cluster.replace([instance], old)

    def recover(self, active: GroupTransition) -> None:
        """After it: the group goes on at the higher degree, and computes its requests again."""
        cluster, transition = self._cluster, active.transition
        instance = transition.instance
        instance.requeue_all(self._requeue)
        instance.sampler.state.replace_lost()
        kv = transition.undo()
        released = max(transition.programs.released)
        empty = [cluster.factory.new_allocator(released) for _ in instance.group.devices]
        allocators = cluster.factory.settle_allocators(instance.group, empty)
        new = cluster.factory.new_instance(
            instance.group, allocators, kv, released, cluster.factory.scratch_of(instance)
        )
        cluster.replace([instance], [new])


def hand_over(
    old: list[Instance],
    views: list[tuple[Instance, Lane, Sequence, SequencePages]],
    requeue: Callable[[Instance, Sequence], None],
) -> None:
    """Have new instances run the sequences of old ones, with other pages. Where that fails, the old ones do.

    Then sequences with a state on the device, which others have written over, are computed again.
    """
    before = [(sequence, sequence.pages, sequence.slot) for _, _, sequence, _ in views]
    try:
        for instance, lane, sequence, pages in views:
            sequence.pages = pages
            instance.add(sequence, lane)
    except BaseException:
        for instance, lane, sequence, _ in views:
            if sequence in lane.running:
                instance.leave(sequence, lane)
        for sequence, pages, slot in before:
            sequence.pages, sequence.slot = pages, slot
        for instance in old:
            for sequence in [s for s in instance.running if s.sampling.uses_state]:
                requeue(instance, sequence)
        raise
    for instance in old:
        for lane in instance.lanes:
            lane.running = []
