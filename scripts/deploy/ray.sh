#!/bin/bash
# Lockstep as a job of a Ray cluster. The words after the script's name are Lockstep's settings:
#
#     export RAY_API_SERVER_ADDRESS=http://head:8265 BUCKET=s3://bucket/first
#     bash scripts/deploy/ray.sh run.epochs=10
#
# Start it in the folder of your code. Ray copies that folder to the nodes, without what .gitignore names and at most
# 512 MB; the copies are temporary, so the run is kept in the bucket. All nodes need the same Python, with
# `pip install 'lockstep-trainer[ray,bucket]'`, and the login of the bucket in their environment.
#
# To look:  ray job logs -f <job>
# To stop:  ray job stop <job>. Ray kills the job 3 s later, unless RAY_JOB_STOP_WAIT_TIME_S says more where the head was
#           started (give it the seconds of a step and a save). The same command resumes from the bucket.
#
# Run on CPUs, on a cluster of one machine (tests/places/test_ray.py).
set -eu
: "${BUCKET:?must be the address of the run in a bucket, as in s3://bucket/first}"

# As many ranks as fit, from 1 to 8, each with a GPU if there are any; the result is the same. After a lost rank or node
# they start again from the newest checkpoint, at most max_restarts times.
exec ray job submit --working-dir . -- python -m trainer task=cifar launch=ray 'launch.ranks=[1,8]' \
  launch.max_restarts=5 run.name=first run.resume=auto checkpoint.mirror="$BUCKET" "$@"
