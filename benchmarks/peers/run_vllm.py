"""Runner of vLLM's CPU build: f32, threads bound to all cores, no prefix caching."""

import os

import timing


class Vllm:
    def __init__(self, job: timing.Job):
        # Whole GiB only. vLLM's processes read these variables and bind threads.
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(-(-job["kv_bytes"] // (1 << 30)))
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        import torch
        import vllm

        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        self.params = vllm.SamplingParams
        self.llm = vllm.LLM(
            model=job["model_dir"],
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=job["max_len"],
            max_num_seqs=max(job["batches"]),
            enable_prefix_caching=False,
            disable_log_stats=True,
            seed=0,
        )

    def start_cell(self, batch: int, tokens: int) -> None:
        pass

    def generate(self, prompts: timing.Prompts, new_tokens: int) -> list[list[int]]:
        params = self.params(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":  # vLLM starts its processes from this file.
    timing.main(Vllm)
