#!/usr/bin/env python3
"""Gantry beside PyTorch on one CPU: the same models, the same batch, the same threads, taking turns.

    cargo build --release
    python3 -m venv /tmp/peer && /tmp/peer/bin/pip install torch transformers
    /tmp/peer/bin/python tests/throughput/cpu.py [--case hybrid-128]... [--rounds 3] [--compile] [--out result.json]

Both sides train in fp32 and do a complete step: forward, cross entropy, backward, clipping at norm 1, AdamW. A step is 8
sequences of 256 tokens. PyTorch runs `nemotron_h` of transformers with random weights; Gantry runs nemotron-hybrid with the
same dimensions, and the script refuses to compare when the numbers of parameters differ. Each program runs alone, in its own
process, in turns; what is compared is the median step of all rounds after the first steps, and the largest resident set
that the system saw. Nothing else should run on the machine meanwhile.

One line per case on stdout and, with --out, everything measured as JSON. Exit status 1 when a floor given by --floor is missed.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

BATCH, SEQ, VOCAB, WARMUP = 8, 256, 272, 3
LAYERS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}


def dims(pattern, hidden):
    """The quick start's proportions at any width; widths inside a head and the state do not grow."""
    return {
        "pattern": pattern, "hidden_size": hidden, "vocab_size": VOCAB, "num_attention_heads": hidden // 32,
        "num_query_groups": 2, "kv_channels": 32, "ffn_hidden_size": 4 * hidden, "mamba_num_heads": hidden // 16,
        "mamba_head_dim": 32, "mamba_num_groups": 2, "mamba_state_dim": 32, "mamba_chunk_size": 64, "num_moe_experts": 8,
        "moe_router_topk": 2, "moe_ffn_hidden_size": hidden, "moe_shared_expert_intermediate_size": hidden,
    }


CASES = {
    "hybrid-128": dims("M*E-ME", 128),
    "hybrid-256": dims("M*E-ME", 256),
    "dense-128": dims("*-*-*-", 128),
    "dense-256": dims("*-*-*-", 256),
}
# The sizes that Nemotron-H models have inside a Mamba-2 head, whatever their width.
for name in ("hybrid-128", "hybrid-256"):
    heads = CASES[name]["hidden_size"] // 32
    CASES[name + "-state-128"] = CASES[name] | {
        "mamba_num_heads": heads, "mamba_head_dim": 64, "mamba_state_dim": 128, "mamba_chunk_size": 128}


def run(command, **options):
    """Output and peak resident set (MiB) of a program."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen(command, stdout=out, stderr=err, text=True, **options)
        _, status, usage = os.wait4(child.pid, 0)
        out.seek(0), err.seek(0)
        if status:
            sys.exit(f"{' '.join(map(str, command))}\nended with {os.waitstatus_to_exitcode(status)}:\n{err.read()[-2000:]}")
        return out.read(), usage.ru_maxrss / 1024


def gantry(model, args, folder):
    recipe = os.path.join(folder, "recipe.yaml")
    with open(recipe, "w") as f:
        json.dump({
            "name": "throughput",
            "modules": {"lm": {"provider": "nemotron-hybrid", "config": model}},
            "data": {"synthetic": {"task": "uniform", "vocab": VOCAB - 1, "document_length": SEQ, "tokens": 1_000_000}},
            "train": {"steps": args.steps, "seq_length": SEQ, "micro_batch_size": args.micro_batch, "global_batch_size": BATCH},
            "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "clip_grad": 1.0},
            "schedule": {"kind": "constant"},
            "checkpoint": {"every": 0},
        }, f)  # JSON is YAML
    parameters = json.loads(run([args.gantry, "plan", recipe, "--json"])[0])["parameters"]
    results = os.path.join(folder, "run")
    environment = os.environ | {"RAYON_NUM_THREADS": str(args.threads)}
    _, peak = run([args.gantry, "train", recipe, "--run-dir", results], env=environment)
    with open(os.path.join(results, "metrics.jsonl")) as f:
        seconds = [json.loads(line)["step_seconds"] for line in f]
    return {"parameters": parameters, "seconds": seconds[WARMUP:], "peak_mib": peak}


def torch_peer(model, args, compiled):
    steps = args.steps if not compiled else max(args.steps, 3 * WARMUP)
    out, peak = run([sys.executable, __file__, "--peer", json.dumps(model), "--steps", str(steps), "--threads",
                     str(args.threads)] + (["--compile"] if compiled else []))
    return json.loads(out.splitlines()[-1]) | {"peak_mib": peak}


def peer(model, steps, threads, compiled):
    """This process is the PyTorch side: train and print one JSON line."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(1234)
    config = AutoConfig.for_model(
        "nemotron_h", vocab_size=VOCAB, hidden_size=model["hidden_size"], num_hidden_layers=len(model["pattern"]),
        layers_block_type=[LAYERS[layer] for layer in model["pattern"]], num_attention_heads=model["num_attention_heads"],
        num_key_value_heads=model["num_query_groups"], head_dim=model["kv_channels"], attention_bias=False,
        intermediate_size=model["ffn_hidden_size"], mlp_hidden_act="relu2", mlp_bias=False, use_bias=False,
        mamba_num_heads=model["mamba_num_heads"], mamba_head_dim=model["mamba_head_dim"], n_groups=model["mamba_num_groups"],
        ssm_state_size=model["mamba_state_dim"], chunk_size=model["mamba_chunk_size"], conv_kernel=4, use_conv_bias=True,
        n_routed_experts=model["num_moe_experts"], num_experts_per_tok=model["moe_router_topk"], n_shared_experts=1,
        moe_intermediate_size=model["moe_ffn_hidden_size"], n_group=1, topk_group=1, norm_topk_prob=True,
        moe_shared_expert_intermediate_size=model["moe_shared_expert_intermediate_size"], tie_word_embeddings=False)
    net = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    parameters = sum(p.numel() for p in net.parameters())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    call = torch.compile(net) if compiled else net
    seconds = []
    for _ in range(steps):
        tokens = torch.randint(0, VOCAB - 1, (BATCH, SEQ + 1))
        start = time.perf_counter()
        logits = call(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"parameters": parameters, "seconds": seconds[WARMUP:], "torch": torch.__version__}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="steps of one process; the first 3 are not counted")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--micro-batch", type=int, default=BATCH, help="sequences in one of Gantry's micro-batches")
    parser.add_argument("--compile", action="store_true", help="compare with compiled PyTorch too")
    parser.add_argument("--gantry", default="target/release/gantry")
    parser.add_argument("--floor", action="append", default=[], metavar="CASE=RATIO", help="least ratio to eager PyTorch")
    parser.add_argument("--out")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        return peer(json.loads(args.peer), args.steps, args.threads, args.compile)

    peers = ["gantry", "eager"] + (["compiled"] if args.compile else [])
    report, missed = {}, []
    for case in args.case or CASES:
        rounds = {name: [] for name in peers}
        for _ in range(args.rounds):
            for name in peers:
                with tempfile.TemporaryDirectory() as folder:
                    result = gantry(CASES[case], args, folder) if name == "gantry" else torch_peer(
                        CASES[case], args, name == "compiled")
                rounds[name].append(result)
        counts = {result["parameters"] for results in rounds.values() for result in results}
        if len(counts) != 1:
            sys.exit(f"{case}: the models differ: {sorted(counts)} parameters")
        rate = {name: BATCH * SEQ / statistics.median(s for r in rounds[name] for s in r["seconds"]) for name in peers}
        peak = {name: max(r["peak_mib"] for r in rounds[name]) for name in peers}
        report[case] = {"model": CASES[case], "parameters": counts.pop(), "tokens_per_second": rate, "peak_mib": peak,
                        "rounds": rounds}
        line = f"{case:22} gantry {rate['gantry']:8,.0f} tokens/s {peak['gantry']:6.0f} MiB"
        for name in peers[1:]:
            line += (f" | {name} {rate[name]:8,.0f} {peak[name]:6.0f} MiB: {rate['gantry'] / rate[name]:.2f} times as fast,"
                     f" {peak['gantry'] / peak[name]:.2f} of the memory")
        print(line, flush=True)
        for floor in args.floor:
            name, least = floor.split("=")
            if name == case and rate["gantry"] < float(least) * rate["eager"]:
                missed.append(f"{case}: {rate['gantry'] / rate['eager']:.2f} times eager PyTorch, below {least}")
    if args.out:
        with open(args.out, "w") as f:
            json.dump({"threads": args.threads, "cases": report}, f, indent=1)
    if missed:
        sys.exit("\n".join(missed))


if __name__ == "__main__":
    main()
