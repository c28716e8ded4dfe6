"""Runner of amoeba-jax on one device. Programs are compiled before the timed runs."""

from importlib.metadata import version

import timing

from amoeba_jax import LLM, SamplingParams

TEMPORARIES = 128 << 20


class Amoeba:
    def __init__(self, job: timing.Job):
        self.versions = {name: version(name) for name in ("amoeba-jax", "jax")}
        self.llm = LLM(
            job["model_dir"],
            num_devices=1,
            dtype="float32",
            # Room for padding of weights and pages.
            device_memory=int(1.05 * job["weight_bytes"] + 1.1 * job["kv_bytes"]) + TEMPORARIES,
            max_num_seqs=1 << (max(job["batches"]) - 1).bit_length(),
            max_model_len=job["max_len"],
            prefix_caching=False,
            progress=False,
        )

    def start_cell(self, batch: int, tokens: int) -> None:
        pass

    def generate(self, prompts: timing.Prompts, new_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        return [list(output.outputs[0].token_ids) for output in self.llm.generate(prompts, params)]


if __name__ == "__main__":
    timing.main(Amoeba)
