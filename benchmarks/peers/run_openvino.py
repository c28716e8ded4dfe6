"""Runner of OpenVINO GenAI: pipeline with continuous batching and a paged cache, in f32.

optimum-intel converts the model in another process.
"""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import timing

GIB = 1 << 30


class OpenVino:
    def __init__(self, job: timing.Job):
        directory = Path(job["scratch"]) / f"{job['model']}-openvino"
        if not directory.exists():
            subprocess.run([sys.executable, __file__, job["model_dir"], str(directory)], check=True)
        import numpy
        import openvino
        import openvino_genai

        self.numpy, self.openvino, self.genai = numpy, openvino, openvino_genai
        self.versions = {name: version(name) for name in ("openvino", "openvino-genai", "optimum-intel")}
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = -(-job["kv_bytes"] // GIB)  # Whole GiB only.
        scheduler.max_num_seqs = max(job["batches"])
        scheduler.enable_prefix_caching = False
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(directory),
            scheduler,
            "CPU",
            {
                "INFERENCE_PRECISION_HINT": "f32",
                "KV_CACHE_PRECISION": "f32",
                "INFERENCE_NUM_THREADS": job["threads"],
                "PERFORMANCE_HINT": "LATENCY",
            },
        )

    def start_cell(self, batch: int, tokens: int) -> None:
        pass

    def generate(self, prompts: timing.Prompts, new_tokens: int) -> list[list[int]]:
        config = self.genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        tensors = [self.openvino.Tensor(self.numpy.array([prompt], dtype=self.numpy.int64)) for prompt in prompts]
        results = self.pipeline.generate(tensors, [config] * len(tensors))
        return [list(result.m_generation_ids[0]) for result in results]


def convert(model_dir: str, directory: str) -> None:
    """Write the model in `model_dir` in OpenVINO's format, in f32."""
    import torch
    from optimum.intel import OVModelForCausalLM

    model = OVModelForCausalLM.from_pretrained(
        model_dir, export=True, compile=False, load_in_8bit=False, dtype=torch.float32
    )
    model.save_pretrained(directory)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        convert(*sys.argv[1:])
    else:
        timing.main(OpenVino)
