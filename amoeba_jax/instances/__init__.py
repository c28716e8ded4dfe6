"""Sequences, the instances that compute them, and the cluster of all instances.

A *sequence* is one sample of a request. An *instance* is a serving replica on one device or a group of devices. A
*page* holds the keys and values (KV cache) of a fixed number of tokens. A *step* is one pass of an instance through the
model.

Read the files in this order:

    sequence.py       tokens and pages of one sample of a request
    queue.py          waiting sequences: order, deadlines, client shares, further samples of a request
    instance.py       a serving replica: its phase, sequences, slots and pages
    lane.py           sequences that travel through the layers together, with their pages

    pace.py           durations of recent steps
    batcher.py        choice of the next step
    step.py           a step: plan, inputs, the launched step, and the thread that reads results
    runner.py         launch of a step
    hidden_states.py  buffers of hidden states, which all steps share
    step_sampler.py   sampling of the next tokens of a step
    site.py           KV cache of one home (device group), and launches of the programs that use it
    page_copies.py    copies of KV pages: on devices, to host memory, and back

    factory.py        construction of instances
    cluster.py        all instances, the memory of their devices, and groups of devices that are out of service
"""
