"""Sequences, the instances that compute them, and the cluster of instances.

Read the files in this order:

    sequence.py       tokens and pages of one sample of a request
    queue.py          waiting sequences: order, deadlines, client shares, further samples
    instance.py       a serving replica: its phase, sequences, slots and pages
    lane.py           sequences that travel through the layers together, with their pages

    batcher.py        contents of the next step, with pace.py
    step.py           a step: plan, inputs, the launched step, and the thread that reads results
    runner.py         launch of a step: programs of its work list (hidden_states.py), sampling (step_sampler.py)
    site.py           KV cache of one home, and its segments
    page_copies.py    copies of pages on devices, and to host memory

    factory.py        construction of instances
    cluster.py        all instances, the memory of their devices, and groups that are out of service
"""
