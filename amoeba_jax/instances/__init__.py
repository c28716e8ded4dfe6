"""Sequences, the instances that compute the sequences, and the cluster of all instances.

A *sequence* is one sample of a request. An *instance* is a serving replica on one device or a group of devices. A
*page* holds the keys and values (KV cache) of a fixed number of tokens. In a *step*, an instance computes tokens of its
sequences, in one pass through the model.

Read the files in this order:

    sequence.py       tokens and pages of one sample of a request
    queue.py          waiting sequences: order, deadlines, shares of clients, further samples of a request
    instance.py       a serving replica: its phase, sequences, slots and pages
    lane.py           sequences that travel through the layers together, and the pages of these sequences

    pace.py           durations of recent steps
    batcher.py        choice of the next step
    step.py           a step: plan, inputs, the launched step, and the thread that reads results
    runner.py         launch of a step
    hidden_states.py  hidden states: one buffer on each device, used by all steps
    step_sampler.py   sampling of the next tokens of a step
    site.py           KV cache of one home (device group), and launches of the programs of this home
    page_copies.py    copies of KV pages: to other pages, to host memory, and back from host memory

    factory.py        construction of instances
    cluster.py        all instances, the memory of their devices, and groups of devices that are out of service
"""
