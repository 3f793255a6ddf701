"""Compares a run's TensorBoard events, as TensorBoard itself reads them, with metrics.jsonl.

    python3 check_tensorboard.py RUN_DIR

Needs the package tensorboard. Every number of metrics.jsonl must be there under its tag, at its step, equal as f32, and
nothing else. Ends with status 1 and the first differences if not.
"""

import json
import pathlib
import struct
import sys

from tensorboard.backend.event_processing import event_accumulator

# As in host/src/observe/tensorboard.rs.
PERFORMANCE = ("tokens", "seconds", "per_second", "bytes")


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def gather(tag, value, to):
    if isinstance(value, dict):
        for key, part in value.items():
            gather(f"{tag}/{key}", part, to)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        to[tag] = f32(value)


def scalars(line):
    found = {}
    for key, value in line.items():
        if key == "step":
            continue
        if key.startswith("valid_"):
            tag = "valid/" + key.removeprefix("valid_")
        elif isinstance(value, dict):
            tag = key
        else:
            tag = ("perf/" if key.endswith(PERFORMANCE) else "train/") + key
        gather(tag, value, found)
    return found


def main():
    run = pathlib.Path(sys.argv[1])
    wanted = {}
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        for tag, value in scalars(line).items():
            wanted[tag, line["step"]] = value
    reader = event_accumulator.EventAccumulator(
        str(run / "tensorboard"), size_guidance={event_accumulator.SCALARS: 0}
    )
    reader.Reload()
    got, times = {}, []
    for tag in reader.Tags()["scalars"]:
        for event in reader.Scalars(tag):
            if (tag, event.step) in got:
                sys.exit(f"{tag} has two values at step {event.step}")
            got[tag, event.step] = event.value
            times.append(event.wall_time)
    different = [key for key in wanted.keys() | got.keys() if wanted.get(key) != got.get(key)]
    if different:
        for key in sorted(different)[:10]:
            print(f"{key}: metrics.jsonl {wanted.get(key)}, TensorBoard {got.get(key)}", file=sys.stderr)
        sys.exit(f"{len(different)} of {len(wanted)} values differ")
    if not wanted:
        sys.exit("metrics.jsonl holds no numbers")
    if not 0 < min(times) <= max(times) < 4e9:
        sys.exit(f"wall times from {min(times)} to {max(times)}")
    files = len(list((run / "tensorboard").iterdir()))
    print(f"{len(wanted)} values of {len(set(tag for tag, _ in wanted))} tags in {files} event files are those of metrics.jsonl")


main()
