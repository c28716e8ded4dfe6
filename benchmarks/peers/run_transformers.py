"""Runner of transformers with torch on CPU: `generate` with its dynamic KV cache and torch's fused attention."""

import timing
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig


class Transformers:
    def __init__(self, job: timing.Job):
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        torch.set_num_threads(job["threads"])
        self.model = AutoModelForCausalLM.from_pretrained(
            job["model_dir"], dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        # The settings of the model have an end token, at which generation would stop.
        self.model.generation_config = GenerationConfig(pad_token_id=0)

    def start_cell(self, batch: int, tokens: int) -> None:
        pass

    def generate(self, prompts: timing.Prompts, new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            outputs = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                use_cache=True,
                max_new_tokens=new_tokens,
            )
        return outputs[:, ids.shape[1] :].tolist()


if __name__ == "__main__":
    timing.main(Transformers)
