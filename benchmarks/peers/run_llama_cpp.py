"""Runner of llama.cpp through its C interface: parallel sequences, f32 weights and KV cache."""

import ctypes

import llama_cpp
import numpy as np
import timing

MAX_BATCH = 2048
"""Maximum tokens of one `llama_decode`: the default of llama.cpp."""


class LlamaCpp:
    def __init__(self, job: timing.Job):
        self.versions = {"llama-cpp-python": llama_cpp.__version__}
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(job["gguf"].encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {job['gguf']}")
        self.threads = job["threads"]
        self.vocab_size = job["vocab_size"]
        self.context = None

    def start_cell(self, batch: int, tokens: int) -> None:
        if self.context:
            llama_cpp.llama_free(self.context)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = batch * -(-tokens // 256) * 256  # llama.cpp rounds up for each sequence.
        settings.n_seq_max = batch
        settings.n_batch = MAX_BATCH
        settings.n_threads = settings.n_threads_batch = self.threads
        settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot make a context of {settings.n_ctx} tokens, {batch} sequences")

    def generate(self, prompts: timing.Prompts, new_tokens: int) -> list[list[int]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)
        length = len(prompts[0])
        together = max(1, MAX_BATCH // length)
        outputs: list[list[int]] = [[] for _ in prompts]
        for first in range(0, len(prompts), together):
            rows = range(first, min(first + together, len(prompts)))
            tokens = [(token, position, row) for row in rows for position, token in enumerate(prompts[row])]
            self._step(tokens, length, outputs)
        for position in range(length, length + new_tokens - 1):
            self._step([(output[-1], position, row) for row, output in enumerate(outputs)], 1, outputs)
        return outputs

    def _step(self, tokens: list[tuple[int, int, int]], length: int, outputs: list[list[int]]) -> None:
        """Compute `length` tokens of each sequence, and append the most likely next token to the sequence's output.

        `tokens`: (token, position, sequence) of each token, sequence by sequence.
        """
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        last = range(length - 1, len(tokens), length)
        for index, (token, position, row) in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = row
            batch.logits[index] = index in last
        status = llama_cpp.llama_decode(self.context, batch)
        llama_cpp.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode of {len(tokens)} tokens failed: {status}")
        for index in last:
            pointer = llama_cpp.llama_get_logits_ith(self.context, index)
            logits = np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self.vocab_size,))
            outputs[tokens[index][2]].append(int(logits.argmax()))


if __name__ == "__main__":
    timing.main(LlamaCpp)
