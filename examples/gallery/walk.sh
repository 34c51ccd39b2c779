#!/bin/sh
# A random walk in awk: any program can be swept. usage: walk.sh DRIFT SEED
awk -v drift="$1" -v seed="$2" -v metrics="${MUSTER_METRICS:-/dev/null}" 'BEGIN {
    srand(seed)
    for (step = 1; step <= 200; step++) {
        place += rand() - 0.5 + drift
        printf "{\"step\": %d, \"place\": %f}\n", step, place > metrics
    }
    printf "{\"place\": %f}\n", place
}' > "${MUSTER_TASK_DIR:-.}/result.json"
