"""Speed compared with PyTorch, all in one run: `make bench`. Two programs, step.lua and
torch_step.py, run side by side and make steps alternately, A B A B; the table shows the median of
each and their ratio. PyTorch is represented by its fastest variant.
"""
import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
QUICK = os.environ.get("BENCH_QUICK", "") not in ("", "0")
ONLY = [part for part in os.environ.get("BENCH_ONLY", "").split(",") if part]
SMALL = dict(layers=6, width=384, heads=6, vocab=256, context=256, batch=8)
LARGE = dict(layers=12, width=768, heads=12, vocab=50257, context=64, batch=4)   # GPT-2 124M
TOKENS = SMALL["context"] * SMALL["batch"]


# seconds: steps slower than this (emulated half precision) are measured fewer times
SLOW = 5


class Program:
    """A process that makes training steps on demand: reads a number, prints seconds per step."""

    def __init__(self, command, threads):
        env = dict(os.environ, OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.errors, text=True, env=env)
        self.ready = self.answer()[0] == "ready"

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            tail = self.errors.read().decode(errors="replace").strip().splitlines()
            raise RuntimeError(tail[-1] if tail else "ended without output")
        return line.split()

    def steps(self, n):
        self.process.stdin.write(f"{n}\n")
        self.process.stdin.flush()
        return [float(s) for s in self.answer()]

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def shape_arguments(shape):
    return [str(shape[key]) for key in ("layers", "width", "heads", "vocab", "context", "batch")]


def ours(engine, precision, shape, threads):
    return Program([engine, f"{HERE}/step.lua", precision, *shape_arguments(shape)], threads)


def best_torch(precision, shape, threads, variants):
    """Starts every variant and keeps the fastest. Returns it, its name and a note on all."""
    best, name, seen = None, None, []
    for variant in variants:
        try:
            program = Program([sys.executable, f"{HERE}/torch_step.py", precision,
                               *shape_arguments(shape), variant], threads)
            seconds = program.steps(2)[1]  # the first one may compile
            if seconds < SLOW:
                seconds = min(program.steps(3))
        except RuntimeError as error:
            seen.append(f"{variant} fails ({error})")
            continue
        seen.append(f"{variant} {seconds:.3f}")
        if best is None or seconds < best[0]:
            if best:
                best[1].close()
            best, name = (seconds, program), variant
        else:
            program.close()
    if best is None:
        sys.exit("bench: no variant of PyTorch runs: " + "; ".join(seen))
    return best[1], name, ", ".join(seen)


def in_turns(a, b, rounds, steps):
    """Medians and best times of both, measured alternately; slow steps are measured once."""
    a.steps(1)
    if b.steps(1)[0] > SLOW:
        rounds = steps = 1
    times = ([], [])
    for _ in range(rounds):
        for program, list_ in zip((a, b), times):
            list_.extend(program.steps(steps))
    return [statistics.median(t) for t in times], [min(t) for t in times]


# ------------------------------------------------------------------ the table


class Table:
    def __init__(self):
        self.rows = []

    def add(self, what, engine, other, ratio, target, met):
        self.rows.append((what, engine, other, ratio, target,
                          {True: "met", False: "missed", None: ""}[met]))
        print(f"  {what}: {engine}  {other}  {ratio}  target {target}  {self.rows[-1][-1]}",
              flush=True)

    def print(self):
        head = ("what", "engine", "beside it", "ratio", "target", "")
        widths = [max(len(row[i]) for row in [head, *self.rows]) for i in range(len(head))]
        for row in [head, *self.rows]:
            print("  ".join(cell.ljust(w) if i == 0 else cell.rjust(w)
                            for i, (cell, w) in enumerate(zip(row, widths))).rstrip())


# ------------------------------------------------------------------ the parts


def bench_step(engine, threads, table):
    for precision, target in (("fp32", 1.2), ("bf16", 1.5), ("fp16", 2.0)):
        variants = ["eager"] + ([] if QUICK else ["compile"])
        if precision == "fp16":
            variants.append("eager-half")
        other, name, note = best_torch(precision, SMALL, threads, variants)
        mine = ours(engine, precision, SMALL, threads)
        (a, b), (least_a, least_b) = in_turns(mine, other, 3 if QUICK else 7, 2)
        mine.close()
        other.close()
        print(f"  PyTorch {precision}, seconds a step: {note}; best times: engine {least_a:.3f}, "
              f"PyTorch {least_b:.3f}, ratio {least_b / least_a:.2f}")
        table.add(f"GPT 6x384, {precision}: tokens/s", f"{TOKENS / a:.0f}",
                  f"{TOKENS / b:.0f} ({name})", f"{b / a:.2f}x", f"{target}x", b / a >= target)


def bench_large(engine, _, table):
    for precision, target in (("fp32", 1.5), ("bf16", 0.5)):
        other, name, _ = best_torch(precision, LARGE, 1, ["eager"])
        mine = ours(engine, precision, LARGE, 1)
        (a, b), _ = in_turns(mine, other, 2, 2)
        mine.close()
        other.close()
        amx = " (needs AMX)" if precision == "bf16" and not has_amx() else ""
        table.add(f"GPT-2 124M, 4 x 64, {precision}, one thread: s/step", f"{a:.2f}",
                  f"{b:.2f} ({name})", f"{b / a:.2f}x", f"{target} s{amx}", a <= target)


def bench_parts(engine, threads, table, scratch):
    reader = f"{scratch}/read.so"
    subprocess.run([*os.environ.get("CC", "cc").split(), "-O3", "-march=native", "-fopenmp", "-shared",
                    "-fPIC", "-o", reader, f"{HERE}/read.c"], check=True)
    env = dict(os.environ, OMP_NUM_THREADS=str(threads))
    done = subprocess.run([engine, f"{HERE}/parts.lua", reader, "5" if QUICK else "15", scratch],
                          capture_output=True, text=True, env=env)
    if done.returncode != 0:
        sys.exit("bench: " + done.stderr)
    median = {}
    for line in done.stdout.splitlines():
        name, *seconds = line.split()
        median[name] = statistics.median(map(float, seconds))
    for format_, size in (("f32", 4), ("f16", 2)):
        read = median[f"read-{format_}"]
        gigabytes = 124 * 2**20 * size * 1e-9
        for name, what in (("stats", "a step's"), ("all", "all, with histogram")):
            share = read / median[f"{name}-{format_}"]
            table.add(f"gradient statistics, {format_}, {what}: GB/s",
                      f"{gigabytes / median[f'{name}-{format_}']:.1f}",
                      f"{gigabytes / read:.1f} (plain read)", f"{100 * share:.0f} %",
                      "80 %" if name == "stats" else "-", share >= 0.8 if name == "stats" else None)
    table.add("one decision of the policy dynamic: us", f"{median['policy'] * 1e6:.3f}", "-", "-",
              "0.2 us", median["policy"] < 0.2e-6)
    share = median["keeping"] / 20e-3
    table.add("scale, policy and history: us a step", f"{median['keeping'] * 1e6:.2f}",
              "20 ms step", f"{100 * share:.3f} %", "1 %", share < 0.01)


def bench_start(engine, _, table):
    def start(command):
        begin = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return (time.perf_counter() - begin) * 1e3

    times = {"engine": [], "require": [], "true": []}
    for _ in range(5 if QUICK else 21):
        times["engine"].append(start([engine, "-e", ""]))
        times["require"].append(start([engine, "-e", "require 'engine'"]))
        times["true"].append(start(["true"]))
    mine, required, true = (statistics.median(times[key]) for key in ("engine", "require", "true"))
    table.add("engine -e '': ms", f"{mine:.1f}", f"{true:.1f} (true)", "-", "20 ms", mine < 20)
    table.add("engine -e 'require \"engine\"': ms", f"{required:.1f}", f"{true:.1f} (true)", "-",
              "-", None)


def has_amx():
    try:
        return " amx_tile" in open("/proc/cpuinfo").read()
    except OSError:
        return False


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True)
    engine = os.path.abspath(parser.parse_args().engine)
    threads = len(os.sched_getaffinity(0))
    torch = subprocess.run([sys.executable, "-c", "import torch; print(torch.__version__)"],
                           capture_output=True, text=True, check=True).stdout.strip()
    print(f"engine and PyTorch {torch}, {threads} threads, {platform.machine()}, "
          f"{'AMX' if has_amx() else 'no AMX'}, "
          f"load {os.getloadavg()[0]:.1f}{', quick' if QUICK else ''}")
    if os.getloadavg()[0] > 0.5 * threads:
        print("warning: the machine is busy with other work; read the ratios with care")
    table, begin = Table(), time.time()
    with tempfile.TemporaryDirectory() as scratch:
        parts = {"start": bench_start, "parts": lambda *a: bench_parts(*a, scratch),
                 "step": bench_step}
        if not QUICK or "large" in ONLY:
            parts["large"] = bench_large
        for name, part in parts.items():
            if not ONLY or name in ONLY:
                part(engine, threads, table)
    print(f"\nin {time.time() - begin:.0f} s, load now {os.getloadavg()[0]:.1f}\n")
    table.print()


main()
