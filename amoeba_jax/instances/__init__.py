"""Sequences, the instances that compute them, and the cluster of instances.

Read the files in this order:

    sequence.py       tokens and pages of one sample of a request
    queue.py          waiting sequences: order, deadlines, client shares, further samples
    instance.py       a serving replica: its phase, sequences, slots and pages
    lane.py           sequences that travel through the layers together, with their page pool
    paused.py         pages of paused instances, on the devices of the instance that serves there
    room.py           the instance for a waiting sequence, and the sequences to preempt for it

    batcher.py        contents of the next step, with prompt_turns.py and pace.py
    step.py           a step: plan, inputs, and the launched step
    step_launcher.py  launch of a step: prepare, run, sample (step_sampler.py), read (result_reader.py)
    runner.py         programs of a step by its work list, with hidden_states.py
    site.py           KV cache of one home, and its segments

    factory.py        construction of instances
    cluster.py        all instances, the memory of their devices, and groups that are out of service
"""
