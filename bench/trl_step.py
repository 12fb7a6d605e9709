"""TRL's GRPO step with a LoRA adapter, to compare with an update and with a stage.

    python bench/trl_step.py --shape 1.7b          # 64 problems x 8 completions of 256 tokens, on a GPU
    python bench/trl_step.py --shape tiny --problems 2 --group 2 --prompt 16 --tokens 8      # on a CPU

GRPOTrainer with transformers' own ``generate`` (no vLLM), no reference model, random rewards, and one optimizer update
of the whole batch by gradient accumulation. Every prompt and every completion has exactly the requested number of
tokens, which is checked. Settings favor TRL: the base's weights are stored in half precision, activations are kept
unless ``--checkpointing``, nothing is logged or saved, and TRL needs no separate scoring pass when one update follows
one generation. "train" is everything in a step except ``generate``.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch

from common import SHAPES, device, make_model, peak_gb, random_prompts, report, seconds, wait

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def word_tokenizer(vocabulary: int) -> Any:
    """A tokenizer in which token ``i`` is the word ``t<i>``, so text and ids are equivalent; 0 is padding and 1 ends a
    message, as in the models here."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    # Special tokens are also matched inside words, so none may be a prefix of a word.
    names = ["<pad>", "<end>", *(f"t{i}" for i in range(2, vocabulary))]
    words = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<pad>", padding_side="left"
    )


def dataset_of(columns: dict[str, list[Any]]) -> Any:
    """A Dataset with a fixed fingerprint. The default one is a hash of a pickle that includes pyarrow. If pyarrow is
    not in a folder called ``site-packages``, it is pickled by its content, which fails."""
    from datasets import Dataset
    from datasets.table import InMemoryTable

    return Dataset(InMemoryTable.from_pydict(columns), fingerprint="rows")


def grpo_step(
    shape: str,
    *,
    problems: int,
    group: int,
    prompt: int,
    tokens: int,
    micro_batch: int,
    precision: str,
    lora: int = 16,
    beta: float = 0.0,
    checkpointing: bool = False,
    cache: str | None = None,
    steps: int = 3,
) -> dict[str, Any]:
    """Medians over ``steps`` steps, after one for warm-up: seconds of generation, of training, and of the whole step.

    ``lora`` is the adapter's rank, on all linear layers; ``precision`` is fp32, bf16 or fp16; ``cache`` is the cache
    implementation of ``generate`` ("static" compiles and captures it). Needs trl.
    """
    from peft import LoraConfig
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = problems * group
    micro_batch = min(micro_batch, rows)
    if rows % micro_batch:
        raise ValueError(f"{rows} completions do not divide into micro-batches of {micro_batch}")
    vocabulary, rng = SHAPES[shape]["vocab_size"], np.random.default_rng(3)
    tokenizer = word_tokenizer(vocabulary)
    ids = random_prompts(rng, problems * (steps + 1), prompt, vocabulary)
    prompts = [" ".join(f"t{i}" for i in row) for row in ids]
    if tokenizer(prompts)["input_ids"] != [row.tolist() for row in ids]:
        raise RuntimeError("the tokenizer does not read the prompts as they were made")
    model = make_model(shape, HALF.get(precision, torch.float32))
    clock = _clock()
    clock.watch(model)

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths = {len(row) for row in completion_ids}
        if lengths != {tokens} or clock.shape != (rows, prompt + tokens):
            raise RuntimeError(f"generated {clock.shape} with {lengths} tokens to train, not {prompt} + {tokens}")
        return rng.random(len(completion_ids)).tolist()

    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder, max_steps=steps + 1, per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=rows // micro_batch, num_generations=group, max_completion_length=tokens,
            generation_kwargs={"min_new_tokens": tokens}, temperature=1.0, top_p=1.0, top_k=0, beta=beta,
            cache_implementation=cache, learning_rate=1e-5, lr_scheduler_type="constant",
            fp16=precision == "fp16", bf16=precision == "bf16",
            gradient_checkpointing=checkpointing, use_cpu=device().type == "cpu", seed=0, report_to="none",
            logging_strategy="no", save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model, reward_funcs=reward, args=settings, processing_class=tokenizer, callbacks=[clock],
            train_dataset=dataset_of({"prompt": prompts}),
            peft_config=LoraConfig(
                r=lora, lora_alpha=2 * lora, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"
            ),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)  # stdout is reserved for --json
        before = _adapter(trainer.model)
        trainer.train()
    if torch.equal(before, _adapter(trainer.model)):
        raise RuntimeError("TRL's steps left the adapter as it was")
    del model, trainer
    gc.collect()  # they are in a reference cycle, and what runs next needs the memory
    generate, whole = clock.generate[1:], clock.whole[1:]
    return {
        "generate s": statistics.median(generate),
        "train s": statistics.median(w - g for w, g in zip(whole, generate, strict=True)),
        "step s": statistics.median(whole),
        "peak GB": peak_gb(),
        "sampled tokens": rows * tokens,
        "trained tokens": rows * (prompt + tokens),
        "micro batch": micro_batch,
        "steps s": whole,
    }


def as_stage(step: dict[str, Any], *, agents: int, epochs: int = 1) -> dict[str, Any]:
    """A stage composed of such steps: before each agent's update, all agents generate again.

    The step's prompt should be a context of medium length: the problem and half of what the other agents say.
    """
    phases = {"sample": agents * agents * step["generate s"], "train": agents * epochs * step["train s"]}
    return {
        **phases,
        "whole": sum(phases.values()),
        "sampled tokens": agents * agents * step["sampled tokens"],
        "peak GB": step["peak GB"],
    }


def _adapter(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten().float().cpu() for p in model.parameters() if p.requires_grad])


def _clock() -> Any:
    """A callback that times whole steps and the model's ``generate`` calls in them, and keeps the shape of the last
    output."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.generate: list[float] = []
            self.whole: list[float] = []
            self.shape: tuple[int, ...] = ()
            self._started = 0.0

        def watch(self, model: Any) -> None:
            plain = model.generate

            def timed(*args: Any, **options: Any) -> Any:
                result: list[Any] = []
                self.generate.append(seconds(lambda: result.append(plain(*args, **options))))
                self.shape = tuple(result[0].shape)
                return result[0]

            model.generate = timed

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            wait()
            self._started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            wait()
            self.whole.append(time.perf_counter() - self._started)

    return Clock()


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.7b" if gpu else "tiny")
    parser.add_argument("--problems", type=int, default=64 if gpu else 2)
    parser.add_argument("--group", type=int, default=8 if gpu else 2)
    parser.add_argument("--prompt", type=int, default=512 if gpu else 16)
    parser.add_argument("--tokens", type=int, default=256 if gpu else 8)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--precision", choices=("fp32", *HALF), default="bf16" if gpu else "fp32")
    parser.add_argument("--lora", type=int, default=16, help="rank of the adapter")
    parser.add_argument("--beta", type=float, default=0.0, help="weight of the KL to a reference; 0 needs none")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations: slower, less memory")
    parser.add_argument("--cache", choices=("static",), help="of generate: compiled and captured (default: dynamic)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after one that warms up")
    parser.add_argument("--agents", type=int, default=3, help="of the stage made of such steps")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    if a.problems * a.group % min(a.micro_batch, a.problems * a.group):
        parser.error(f"{a.problems} x {a.group} completions do not divide into micro-batches of {a.micro_batch}")
    try:
        from trl import GRPOTrainer, __version__  # noqa: F401
    except (ImportError, RuntimeError) as error:  # its lazy modules raise RuntimeError if a dependency is missing
        sys.stderr.write(f"trl is not installed: pip install trl ({error})\n")
        sys.exit(3)
    options = {k: v for k, v in vars(a).items() if k not in ("shape", "agents", "json")}
    step = grpo_step(a.shape, **options)
    stage = as_stage(step, agents=a.agents)
    keys = (
        "generate s",
        "train s",
        "step s",
        "sampled tokens/s",
        "train tokens/s",
        f"stage of {a.agents} s",
        "peak GB",
    )
    step["sampled tokens/s"] = step["sampled tokens"] / step["generate s"]
    step["train tokens/s"] = step["trained tokens"] / step["train s"]
    row = (f"TRL {__version__}", *({**step, f"stage of {a.agents} s": stage["whole"]}[k] for k in keys))
    title = f"{a.shape}, {a.precision}, {a.problems} problems x {a.group}, {a.prompt} + {a.tokens} tokens"
    record = {"benchmark": "trl_step", **vars(a), "trl": __version__, "results": {"TRL": step}, "stage": stage}
    report(title, ("", *keys), [row], record, a.json)


if __name__ == "__main__":
    main()
