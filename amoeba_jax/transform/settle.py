"""End of a transition: it succeeds, is aborted, or fails and its group is recovered.

A transition can be aborted until its first layer switches. The old instances then serve again. If it fails later, the
group gets the higher degree, because the devices always keep the weights of that degree. All other extents become an
empty cache, and the group's requests are computed again from their tokens.
"""

from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.instance import Instance, Phase
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.transform.lanes import adopt_prefixes, move_into, pages_at
from amoeba_jax.transform.merge_split import Requeue, hand_over
from amoeba_jax.transform.parallel_attention import divide_attention, serve_parallel
from amoeba_jax.transform.transition import Transition
from kvcache.pages import PagePool, SequencePages
from sharding.placement import Placement


def settle_high(cluster: Cluster, transition: Transition) -> None:
    """End a merge: the lanes of the merged instance become one lane. Its pages are the pages of the new layout."""
    instance = transition.instance
    allocators = cluster.factory.settle_allocators(instance.group, transition.allocators)
    _serve_high(cluster, instance, PagePool(cluster.dims.pages, allocators, instance.tp))


def _serve_high(cluster: Cluster, instance: Instance, pool: PagePool) -> None:
    home = instance.group.home
    lane = cluster.factory.new_lane(pool, instance.group)
    for sequence, own in move_into(lane, instance.lanes, home):
        sequence.pages = own
        lane.running.append(sequence)
    instance.lanes, instance.lane_buckets, instance.transition = [lane], instance.buckets, None
    instance.attention_degree = instance.tp
    instance.enter(Phase.SERVING)
    instance.runner.sites, instance.allocators = {home: instance.site}, {home: pool.allocators}
    instance.runner.place(Placement.uniform(home, cluster.dims.config.num_layers))
    if instance.paused:
        instance.take_the_place_of(instance.paused)


def settle_low(cluster: Cluster, transition: Transition, requeue: Requeue) -> None:
    """End a split: instances of the lower degree take over sequences and pages.

    If only attention is divided, the instance stays. If the group has paused instances, they resume and take over.
    Otherwise new instances are created.
    """
    instance, programs, factory = transition.instance, transition.programs, cluster.factory
    if programs.attention_only:
        divide_attention(cluster, transition)
        return
    tokens, tp = factory.last_tokens_of(instance), programs.lower
    new, views = list(instance.paused), list[tuple[Instance, Lane, Sequence, SequencePages]]()
    for index, (site, lane) in enumerate(zip(transition.members, instance.lanes, strict=True)):
        if not instance.paused:
            allocators = factory.allocators_of(site.group)
            own = tokens[index * tp : (index + 1) * tp]
            new.append(factory.new_instance(site.group, allocators, site.kv, programs.released[1], own))
        target = new[index].lane
        views += [(new[index], target, *pages) for pages in pages_at(target.pages, [lane], site.group.home)]
    hand_over([instance], views, requeue)  # may fail: nothing has changed before
    if transition.kept is not None:
        transition.kept.settle()
    factory.settle_allocators(instance.group, transition.allocators)
    for own, lane in zip(new, instance.lanes, strict=True):
        adopt_prefixes(own.lane, [lane], own.group.home)
    for member, site in zip(instance.drop_paused(), transition.members, strict=False):
        member.site.kv[:] = site.kv
    cluster.replace([instance], new)


def abort(cluster: Cluster, transition: Transition) -> None:
    """Restore the old instances.

    Call this before the first layer has switched: no page has moved, and no step has run.
    """
    instance, factory = transition.instance, cluster.factory
    if transition.up and transition.programs.attention_only:
        serve_parallel(cluster, instance, transition.members)
        return
    if not transition.up:
        _serve_high(cluster, instance, PagePool(cluster.dims.pages, factory.allocators_of(instance.group), instance.tp))
        return
    instance.transition = None
    instance.sampler.state.replace_lost()  # the old instances write the rows of their sequences again
    tokens, tp = factory.last_tokens_of(instance), transition.programs.lower
    old, views = list[Instance](), list[tuple[Instance, Lane, Sequence, SequencePages]]()
    parts = zip(transition.old, transition.members, instance.lanes, strict=True)
    for index, (before, site, lane) in enumerate(parts):
        allocators, own = factory.allocators_of(site.group), tokens[index * tp : (index + 1) * tp]
        old.append(factory.new_instance(site.group, allocators, site.kv, before.released, own))
        views += [(old[-1], old[-1].lane, *own) for own in move_into(old[-1].lane, [lane], site.group.home)]
    for lane in instance.lanes:
        lane.running = []
    for new, lane, sequence, pages in views:
        sequence.pages = pages
        new.add(sequence, lane)
    cluster.replace([instance], old)


def recover(cluster: Cluster, transition: Transition, requeue: Requeue) -> None:
    """Recover a group after the first layer has switched: it serves at the higher degree with an empty cache."""
    instance, factory = transition.instance, cluster.factory
    instance.requeue_all(requeue)
    instance.sampler.state.replace_lost()
    kv = transition.undo()
    released = max(transition.programs.released)
    empty = [factory.new_allocator(released) for _ in instance.group.devices]
    allocators = factory.settle_allocators(instance.group, empty)
    factory.hidden.replace_lost(instance.group.device_indices)
    tokens = factory.last_tokens_of(instance)
    cluster.replace([instance], [factory.new_instance(instance.group, allocators, kv, released, tokens)])
