"""Memory of a LoRA team on one shared base: three agents against one, each measured in its own process.

    python bench/memory.py [--json]

Makes a model of about 83 million parameters (random weights), trains one stage of a team of one and of a team of
three adapters on it, and compares peak resident memory. Peaks include the interpreter and the libraries; the figures
without them (peak minus the memory before the model was loaded) are shown too.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path


def make_model(folder: Path) -> int:
    """Save a random model with the built-in tokenizer; returns its number of parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from teamtr.engines.torch.tokenizer import character_tokenizer

    tokenizer = character_tokenizer()
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=768,
            intermediate_size=2304,
            num_hidden_layers=12,
            num_attention_heads=12,
            num_key_value_heads=4,
            head_dim=64,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [json.dumps({"question": f"say {i}", "answer": str(i)}) for i in range(20)]
    (folder / "questions.jsonl").write_text("\n".join(rows))
    return sum(p.numel() for p in model.parameters())


def peak_mib() -> float:
    """Peak resident memory of this process; ru_maxrss would include the memory of its parent at the fork."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(x.split()[1]) for x in status.read_text().splitlines() if x.startswith("VmHWM")) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(folder: Path, agents: int) -> dict[str, float]:
    """Train one stage of a team of this many adapters in this process."""
    import torch

    from teamtr.config import loads
    from teamtr.session import train as run

    torch.set_num_threads(1)
    names = ", ".join(f"{{name: a{k}}}" for k in range(agents))
    text = f"""
name: memory
task: {{name: data, path: {folder}/questions.jsonl, held_out: 0.3, grader: "python:{folder}/reward.py:reward"}}
team: {{model: {folder}/model, train: lora, lora: {{rank: 8}}, max_tokens: 8, agents: [{names}]}}
plan: {{stages: 1, problems: 2, group_size: 4, radius_nats_per_message: 0.05}}
learner: {{epochs: 1, minibatches: 2, micro_batch: 4}}
eval: {{every: 0}}
"""
    (folder / "reward.py").write_text(
        "def reward(prompts, completions, **c):\n    return [len(x) % 3 for x in completions]\n"
    )
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401  (so that it counts as library, not as team)

    before = peak_mib()
    updates = [r for r in run.train(loads(text), folder / f"run-{agents}") if r["kind"] == "update"]
    assert len(updates) == agents
    return {"agents": agents, "peak_mib": peak_mib(), "team_mib": peak_mib() - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "AGENTS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(Path(args.measure[0]), int(args.measure[1]))))
        return
    with tempfile.TemporaryDirectory() as name:
        parameters = make_model(Path(name))
        found = [
            json.loads(
                subprocess.run(
                    [sys.executable, __file__, "--measure", name, str(n)], check=True, stdout=subprocess.PIPE, text=True
                ).stdout.splitlines()[-1]
            )
            for n in (1, 3)
        ]
    one, three = found
    result = {
        "parameters": parameters,
        "one": one,
        "three": three,
        "ratio_peak": round(three["peak_mib"] / one["peak_mib"], 3),
        "ratio_team": round(three["team_mib"] / one["team_mib"], 3),
    }
    if args.json:
        print(json.dumps(result))
        return
    print(f"{parameters / 1e6:.0f} M parameters in float32, LoRA rank 8, peak resident memory")
    for row in found:
        print(f"  {row['agents']} agents  {row['peak_mib']:6.0f} MiB in all, {row['team_mib']:6.0f} MiB for the team")
    print(f"  ratio     {result['ratio_peak']:6.2f}          {result['ratio_team']:6.2f}")


if __name__ == "__main__":
    main()
