"""Checks `gantry convert` against Python transformers, both ways.

    python3 check_hugging_face.py target/release/gantry [--steps 20] [--small] [--keep DIR]

Needs the packages torch, transformers (5) and safetensors; so it is no part of .ci/run, whose Rust tests hold the conversion
itself to a golden of transformers. Run it after a change to conversion, or with a new version of transformers.

1. The quick start's model, trained for a few steps, is exported whole, in several files and in bf16. transformers loads each
   without a missing or unexpected tensor and gives the logits that `gantry eval --logits` wrote: largest difference below
   2e-5 of the largest logit. Its tokenizer gives the bytes of a text, and generation goes on from a prompt.
2. A model that transformers makes (about 100 million parameters, 0.3 million with --small, random), saved in fp32 and bf16, is
   imported and exported again: every tensor comes back byte for byte, logits agree as above. Seconds and peak memory of
   each conversion are printed; memory must stay below 100 MB, whatever the model's size.

Ends with status 1 and what differs if not.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import torch
import transformers
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, NemotronHConfig, NemotronHForCausalLM

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOLERANCE = 2e-5
MOST_MEMORY = 100e6
TEXT = "pub fn main() {\n    println!(\"héllo\");\n}\n" * 8


def run(*command):
    """Runs a command; gives what it printed, seconds and peak memory in bytes."""
    begin, peak = time.monotonic(), 0
    with tempfile.TemporaryFile() as out:
        child = subprocess.Popen([str(part) for part in command], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        # The kernel's own sum for a child counts this process too, from which it was forked.
        while child.poll() is None:
            try:
                status = pathlib.Path(f"/proc/{child.pid}/status").read_text()
                program = os.readlink(f"/proc/{child.pid}/exe")
            except OSError:
                break
            if "VmHWM:" in status and program == str(command[0]):
                peak = max(peak, int(status.split("VmHWM:")[1].split()[0]) * 1024)
            time.sleep(0.001)
        child.wait()
        seconds = time.monotonic() - begin
        out.seek(0)
        said = out.read().decode()
    if child.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} ended with {child.returncode}:\n{said}")
    return said, seconds, peak


def convert(gantry, begin, end, source, target, *options):
    said, seconds, memory = run(gantry, "convert", "--from", begin, "--to", end, source, target, *options)
    size = sum(file.stat().st_size for file in target.rglob("*.safetensors"))
    print(f"{begin:>8} -> {end:8} {target.name:20} {size / 1e6:8.1f} MB {seconds:6.2f} s, peak {memory / 1e6:6.1f} MB")
    if memory > MOST_MEMORY:
        sys.exit(f"the conversion took {memory / 1e6:.0f} MB of memory")
    return said


def tensors(folder):
    """Name to (type, bytes) of every tensor of a folder."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():
                assert name not in found, name
                tensor = opened.get_tensor(name)
                found[name] = (tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found


def load(folder, dtype):
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(what):
            sys.exit(f"{folder}: {what}: {info[what]}")
    return model.eval()


def compare(model, file, what, tolerance=TOLERANCE):
    """The logits of a model against those that gantry wrote, sequence by sequence."""
    with safe_open(file, "pt") as opened:
        tokens, bounds = opened.get_tensor("tokens").long(), opened.get_tensor("cu_seqlens").tolist()
        ours = opened.get_tensor("logits")
    with torch.no_grad():
        theirs = [model(tokens[None, a:b]).logits[0].float() for a, b in zip(bounds, bounds[1:])]
    theirs = torch.cat(theirs)
    # Gantry gives the padding of a vocabulary no probability; transformers knows nothing of padding.
    known = ours[0] > float("-inf")
    assert known.any() and (ours[:, ~known] == float("-inf")).all(), "padding differs from token to token"
    ours, theirs = ours[:, known], theirs[:, known]
    error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    print(f"{what}: {ours.shape[0]} tokens, {ours.shape[1]} logits each, largest difference of logits {error:.1e} of the largest")
    if not error < tolerance:
        sys.exit(f"{what}: logits differ")


def trained(gantry, here, steps):
    run_dir, logits, text = here / "run", here / "run.logits", here / "text.txt"
    text.write_text(TEXT)
    run(gantry, "train", "recipes/cpu/quickstart.yaml", "--steps", steps, "--run-dir", run_dir, "--set", "train.sample=null",
        "--set", "train.eval_every=0", "--set", "data.ngram_order=0", "--set", "data.valid_fraction=0")
    recipe = run_dir / "recipe.resolved.yaml"
    run(gantry, "eval", recipe, "--checkpoint", run_dir, "--data", text, "--logits", logits)
    convert(gantry, "gantry", "hf", run_dir, here / "whole")
    convert(gantry, "gantry", "hf", run_dir, here / "sharded", "--max-shard-size", "500KB")
    convert(gantry, "gantry", "hf", run_dir, here / "bf16", "--dtype", "bf16")
    assert tensors(here / "whole") == tensors(here / "sharded")
    assert len(list((here / "sharded").glob("*.safetensors"))) > 3
    compare(load(here / "whole", torch.float32), logits, "trained, one file")
    compare(load(here / "sharded", torch.float32), logits, "trained, sharded")
    # Rounding of weights to 8 bits: a check that they are the right ones, no more.
    compare(load(here / "bf16", torch.float32), logits, "trained, bf16 weights", 0.05)

    tokenizer = AutoTokenizer.from_pretrained(here / "whole")
    ids = tokenizer(TEXT)["input_ids"]
    assert ids == list(TEXT.encode()), ids[:20]
    assert tokenizer.decode(ids) == TEXT
    model = load(here / "whole", torch.float32)
    prompt = tokenizer("pub fn ", return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    print(f"transformers writes {tokenizer.decode(written[0])!r}")
    # Megatron's names and back.
    convert(gantry, "gantry", "megatron", run_dir, here / "megatron")
    convert(gantry, "megatron", "hf", here / "megatron", here / "again")
    assert tensors(here / "again") == tensors(here / "whole")


def imported(gantry, here, small):
    torch.manual_seed(1)
    size = 1 if small else 8
    kinds = ["linear_attention", "moe", "full_attention", "mlp"]
    config = NemotronHConfig(
        vocab_size=512 if small else 32768, hidden_size=64 * size, layers_block_type=kinds * (1 if small else 4),
        num_attention_heads=size * 2, num_key_value_heads=2, head_dim=32, intermediate_size=256 * size,
        mamba_num_heads=2 * size, mamba_head_dim=64, n_groups=2, ssm_state_size=64, n_routed_experts=16,
        num_experts_per_tok=4, moe_intermediate_size=64 * size, moe_shared_expert_intermediate_size=128 * size,
        routed_scaling_factor=2.5, initializer_range=0.05, tie_word_embeddings=False, use_cache=False)
    model = NemotronHForCausalLM(config).eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.1, 0.1)
    print(f"made a model of {sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters")
    text = here / "text.txt"
    text.write_text(TEXT)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        source, checkpoint, back = here / f"hf-{name}", here / f"gantry-{name}", here / f"back-{name}"
        if dtype != torch.float32:
            model = load(here / "hf-fp32", dtype)
        model.save_pretrained(source, max_shard_size="100MB")
        convert(gantry, "hf", "gantry", source, checkpoint)
        convert(gantry, "gantry", "hf", checkpoint, back)
        before, after = tensors(source), tensors(back)
        differ = [n for n in before.keys() | after.keys() if before.get(n) != after.get(n)]
        if differ:
            sys.exit(f"{name}: {len(differ)} tensors differ: {sorted(differ)[:4]}")
        print(f"{name}: all {len(before)} tensors came back byte for byte")
        # transformers limits time steps to time_step_min; the same limit for this comparison.
        limited, logits = here / f"limited-{name}", here / f"{name}.logits"
        convert(gantry, "hf", "gantry", source, limited, "--set", "mamba_dt_limit_min=0.001")
        evaluate = [gantry, "eval", limited / "recipe.yaml", "--checkpoint", limited, "--data", text]
        run(*evaluate, "--set", "train.seq_length=128", "--logits", logits)
        compare(load(source, torch.float32), logits, f"imported, {name}")
        # Without it, what is exported is the model without a limit, in transformers too.
        run(gantry, "eval", checkpoint / "recipe.yaml", "--checkpoint", checkpoint, "--data", text,
            "--set", "train.seq_length=128", "--logits", logits)
        compare(load(back, torch.float32), logits, f"exported, {name}")
    assert json.loads((here / "back-bf16/config.json").read_text())["torch_dtype"] == "bfloat16"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gantry", type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("--steps", default="20")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--keep", type=pathlib.Path)
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count())
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        here = (arguments.keep or pathlib.Path(folder)).resolve()
        for part in ("trained", "imported"):
            (here / part).mkdir(parents=True)
        trained(arguments.gantry, here / "trained", arguments.steps)
        imported(arguments.gantry, here / "imported", arguments.small)
    print("ok")


if __name__ == "__main__":
    main()
