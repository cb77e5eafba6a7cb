"""Compares random calls of attention with dense attention: `python tests/fuzz/calls.py --cases 50000 --seed 1`."""

import argparse
import functools
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "_support"))

import masked_attention
import random_cases

MOST_PROBLEMS = 25
KINDS = {"masks": masked_attention.check, "arguments": random_cases.check}


def outcome(kind: str, seed: int, at_all_levels: bool, number: int) -> str:
    """What is wrong with a case, at one level in turn or at all of them."""
    levels = masked_attention.LEVELS
    try:
        KINDS[kind](seed, number, levels if at_all_levels else [levels[number // 3 % len(levels)]])
    except AssertionError as error:
        return str(error)
    except Exception:
        return f"case {number} of seed {seed}: {traceback.format_exc()}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares random calls of attention with dense attention.")
    parser.add_argument("--of", choices=KINDS, default="masks", help="what is random in the first place")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=50_000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument(
        "--all-levels", action="store_true", help="each case at every level, not at one in turn"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    start, problems, done = time.monotonic(), 0, 0
    cases = range(options.first, options.first + options.cases)
    with multiprocessing.get_context("spawn").Pool(options.jobs, warnings.simplefilter, ["ignore"]) as pool:
        run = functools.partial(outcome, options.of, options.seed, options.all_levels)
        for done, problem in enumerate(pool.imap(run, cases, 50), 1):
            if problem:
                problems += 1
                print(f"-- {problem}", flush=True)
            if problems == MOST_PROBLEMS:
                break
            if done % 10_000 == 0:
                print(f"{done} cases, {time.monotonic() - start:.0f} s", flush=True)
    print(f"{done} cases of seed {options.seed}: {problems} problems")
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())
