"""Causes of differences between papers and simulation, and published numbers that `papers.py` does not reproduce."""

from paper_rows import Row

CAUSES = (
    ("AMOEBA Table 1", "TP1 context",
     "It is the difference of two numbers that are ten times as large: 5% more memory on each device gives 3.75K."),
    ("AMOEBA Table 1", "pool of the sizes",
     "448 tokens/s with a read of the weights of 15.6 ms need at least 7 requests of 1K, so a pool holds more than "
     "the longest context of 3.75K. The paper does not state what else the memory has."),
    ("AMOEBA Figure 9a", "70 MB",
     "Only bytes over the link and the memory, and few launches. AMOEBA also maps pages by driver calls."),
    ("AMOEBA Figure 9a", "",
     "This engine exchanges 16 pages (1 MiB) in a phase, to need 3 MiB of temporaries: 163 phases, whose operators "
     "and latencies take 2.5 of 3.3 ms. AMOEBA uses up to 70 MB (Figure 9b): the next row."),
    ("Gyges 3.4", "",
     "A unit test of the transformation before its layout was changed. Copies in page-friendly order take 2.6 times "
     "as long as exchanges in place (docs/performance.md, on CPU): 560 ms."),
    ("AMOEBA 2.4", "",
     "41 times 64 layers of 1.56 ms (Figure 9a) are 4.1 s for 45 GB of a device: 11 GB/s, as through pageable memory. "
     "Here, Seesaw has all of PCIe 5 (50 GB/s: 0.9 s), and in place takes twice as long as in the paper (Figure 9a)."),
    ("AMOEBA Figure 11", "Seesaw",
     "As for 2.4."),
    ("AMOEBA Figure 11", "beside decodes",
     "64 layers of 1.56 ms (Figure 9a) are 100 ms, and under 1% only of a step of 10 s. So the paper's steps compute "
     "long prompts: the last row of Figure 11."),
    ("AMOEBA Figure 11", "beside a prompt",
     "As Figure 9a: phases of 1 MiB."),
    ("AMOEBA Figure 12", "",
     "At 61 requests a minute, arrivals fix the tokens/s: each policy that keeps up generates the same. Eight H20 "
     "compute 12 prompts of 1K tokens in a second, and one arrives. A gain of 26% needs baselines that fall behind: "
     "the paper states no backlog, output length or rate that would cause it. At 480 a minute with the capacities of "
     "Table 1, TP1 is full with three requests in each policy."),
    ("AMOEBA Figure 14", "times the tokens",
     "A private trace. Within the load that all policies keep up with, arrivals fix the tokens/s, as in Figure 12."),
    ("AMOEBA Figure 14", "",
     "A private trace. Here, a merged instance serves one long prompt at a time, and its TTFT is the time of FLOPS: "
     "pipelines and sequence parallelism have as many. They lose in decode steps, by 7%."),
    ("KunServe, in Gyges", "",
     "Of which load, and over what, is not stated; the trace is private. Here, with a backlog, pipelines are full: "
     "bubbles and weights that each stage reads cost little."),
    ("LoongServe, in Gyges", "",
     "As KunServe: a backlog hides what decodes lose. LoongServe's own numbers are rows above."),
    ("Flying Serving Table 2", "TP2's weights kept",
     "1.9M tokens are more than TP2's weights leave if they are kept, as section 4.1 says: weights must be released "
     "for them."),
    ("Flying Serving Table 2", "live switch",
     "2 ms are set: this engine rebuilds its views of the cache. The paper's engine also synchronizes its workers."),
    ("Flying Serving Table 1", "static-tp8: mean TTFT, priority",
     "Urgent requests have their first token after 63 ms where all wait 2,130 ms: here, they wait for a slot."),
    ("Flying Serving Table 1", "static-tp8: mean TTFT",
     "A queue at the limit of the load: it depends on lengths that the paper does not state."),
    ("Flying Serving Table 1", "flying: mean TPOT",
     "Half of the devices serve the best-effort requests here, as `urgent_degree` 4 says; the paper does not state "
     "its share."),
    ("Flying Serving Table 1", "TTFT",
     "Prompts of 1,024 tokens are assumed: the paper's lengths are not stated, and TTFT is proportional to them."),
    ("Flying Serving Table 1", "TPOT",
     "Steps that also compute prompts: batches of unknown lengths."),
    ("Flying Serving Table 1", "peak",
     "The largest rate in 5 s; the paper does not state its window."),
    ("Flying Serving Figure 8", "over flying",
     "The abstract's largest factor of three models under high load; the factor of this model is lost in the text. "
     "Here, static TP8 is overloaded, so its queue grows with the length of the run."),
    ("Flying Serving Figure 8", "",
     "Bursts are near overload: single seeds differ by a factor of 3, because each phase draws a rate from 10 to 30 "
     "requests/s. The paper shows one run."),
    ("Flying Serving Figure 9", "",
     "The largest rate in 5 s; the paper does not state its window."),
    ("Flying Serving 6.2", "over flying",
     "The abstract's largest factor of three models under low load; the factor of this model is lost in the text."),
    ("Flying Serving 6.2", "",
     "Here, a prompt of 1,500 tokens takes 80 ms at TP8, and waits for the step before it. The lengths were fitted to "
     "bursts, the paper states none, and its TTFT is twice as long with the same load."),
    ("Shift Parallelism", "TTFT of Shift",
     "Only the all-to-alls of Ulysses are modelled, at the rate of all-reduces, and no host time of its engine."),
    ("CoCoServe Figure 6", "Equation 4",
     "The paper's gain exceeds its own Equation 4."),
    ("CoCoServe Figure 6", "",
     "The paper's gain exceeds its own Equation 4: at 50 requests, a third of its baseline's requests fail, so it is "
     "relief of a queue and of memory."),
    ("CoCoServe Figure 10", "",
     "Memory shows 8.6 replicated layers of 80: at most 1.06 by Equation 4."),
    ("CoCoServe Figure 11", "failed",
     "Two devices serve 55 requests/s here without a queue: no deadline passes."),
    ("CoCoServe Figure 11", "",
     "The paper does not state the number of devices, lengths or deadline."),
)  # fmt: skip
"""Beginning of `Row.where`, part of `Row.what`, and cause of a difference. The first that fits counts."""


def cause(row: Row) -> str | None:
    """Return the cause of a difference; None if no cause is known."""
    for where, what, text in CAUSES:
        if row.where.startswith(where) and what in row.what:
            return text
    return None


NOT_REPRODUCED = (
    "Output lengths of the papers' workloads are not stated (AMOEBA 4.2.4, 4.3; Flying 6.1.3): the sweeps vary them.",
    "Production traces are private: AMOEBA Figures 2 and 14.",
    "50K tokens of prompt on four H20 take 8.3 s at all their FLOPS, and 12 s at the share that kernels reach: long "
    "requests can hardly meet 10 s (AMOEBA 4.3).",
    "Seesaw 6.2 to 6.4: throughputs are relative to vLLM's best layout for lengths that the paper plots only, and no "
    "time of a re-sharding is stated. AMOEBA measured it (2.4, Figure 11).",
    "Shift Parallelism under Flying's loads: 70B in bf16 with a copy for each degree needs 159 GB of an H200's 141 GB.",
    "Flying Serving Figure 8, P90 TTFT and queue time: the text of the paper has lost the factors.",
    "KunServe 5.3: bubbles of 8.3% with its batch formulation and 21.9% without; here all micro-batches are equal.",
)
"""Published numbers without a row, with the reason."""
