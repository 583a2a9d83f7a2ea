"""What the tests of meshes share."""

import pytest
from harness import fit_on


@pytest.fixture(scope="module")
def single(request):
    """Return a function that trains one of the CASES of a file on one process, once."""
    task, cases = request.module.TASK, request.module.CASES
    runs = {}

    def run(name, folder, *more):
        key = (name, more)
        if key not in runs:
            runs[key] = fit_on(1, folder / "one", *task, "strategy=single", *cases[name], *more)
        return runs[key]

    return run
