"""Every family's torchtune model, corrected, gives transformers' probability to every token."""

import numpy as np
import pytest
import torch
from family_models import CASES, LONG, SHORT, build, checkpoints, torchtune_nll, transformers_nll  # noqa: F401

from ppl_eval.config_check import check_config
from ppl_eval.families import family_of

BY_NAME = {case.name: case for case in CASES}
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@every_case
@pytest.mark.parametrize("num_inputs", [SHORT, LONG])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.float64, 1e-9)], ids=str)
def test_parity(case, num_inputs, dtype, tolerance, checkpoints):  # noqa: F811
    folder = checkpoints(case)
    expected = transformers_nll(folder, num_inputs, dtype)
    model, config, _ = build(case, folder, dtype)
    assert check_config(model, f"torchtune.models.{case.family}.any", config) == []
    actual = torchtune_nll(model, num_inputs, dtype)
    assert expected.dtype == actual.dtype
    assert expected.std() > 1  # far from uniform: a wrong model would be seen
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)
    assert actual.sum(dtype=np.float64) == pytest.approx(expected.sum(dtype=np.float64), rel=1e-6)
