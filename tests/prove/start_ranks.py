"""Starts N processes of a script with torchrun's variables, without loading torch itself."""

import os
import socket
import subprocess
import sys

with socket.socket() as place:
    place.bind(("127.0.0.1", 0))
    port = place.getsockname()[1]
count = int(sys.argv[1])
shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
ranks = []
for rank in range(count):
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    environment = os.environ | shared | {name: str(value) for name, value in own.items()}
    ranks.append(subprocess.Popen([sys.executable, *sys.argv[2:]], env=environment))
sys.exit(max(abs(each.wait()) for each in ranks))
