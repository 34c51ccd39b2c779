"""``muster.fit`` as a program of its own: the devices, and the exit code that it has come to."""

import sys

import phases_training

import muster

if __name__ == "__main__":
    done = muster.fit(phases_training.Model, devices=sys.argv[1], tensorboard=False, run_dir="run")
    print(f"exit code {done.exit_code}", "results" if done.results else "no results")
    sys.exit(done.exit_code)
