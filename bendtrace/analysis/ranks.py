"""Rank of the features at nodes, over a data set."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bendtrace.analysis.analyser import Analyser, Batch
from bendtrace.analysis.matrices import (
    Products,
    Rows,
    as_matrix,
    check_features,
    check_positive,
    check_squares,
    chosen_features,
    in_double,
)
from bendtrace.analysis.singular_values import (
    Spectrum,
    centring_error,
    check_tolerances,
    spectrum,
    spectrum_of_gram,
    spectrum_of_products,
)
from bendtrace.analysis.values import Keep, check_keep
from bendtrace.errors import InputError

__all__ = ["Rank"]

_MODES = ("aTa", "aaT", "a")


class Rank(Analyser):
    """The numerical rank of the features at nodes, over all samples that came by.

    Let A be the matrix of all samples by features. `mode` says what its rank is found from:

    - `"aTa"`: the features x features matrix of the inner products of its columns, which is added
      up in float64. Memory does not grow with the samples.
    - `"aaT"`: the samples x samples matrix of those of its rows. All samples are kept.
    - `"a"`: its singular values. All samples are kept.

    All modes give the same rank: a singular value of A counts as zero up to a tolerance that is
    the same for all of them, `rtol` times the largest one. The default of `rtol` is the number of
    features times the machine epsilon of their dtype, at least what a Gram matrix in float64
    resolves, which is about 1e-6 for 10,000 samples. Only `"a"` can be told to look closer.

    Besides `rank`, results have its part of the largest possible one, the effective rank (Roy and
    Vetterli 2007), the stable rank (Rudelson and Vershynin 2007), the participation ratio (Gao et
    al. 2017), and the numbers of samples and features; see `Spectrum`. They are NaN where a
    feature was.

    Args:
        mode: see above.
        centred: whether the mean of each feature is taken away first, as in the covariance matrix.
        keep: which dimensions are features: `"units"` for all but the first, 1 for channels, -1
            for the last, or several; each position in the others is a sample of its own.
        rtol: singular values of A up to this part of the largest count as zero.
        atol: singular values of A up to this count as zero; without an `rtol` it alone says so.
        max_samples: how many samples may be kept in the modes that keep them.
        max_features: how many features there may be in the mode `"aTa"`, which needs the square of
            it.
        subset: look at so many of the features only, if there are more; which ones `seed` says.
        seed: seed of their choice. The global random numbers are not touched.
        per_pass: whether each pass of a node has results of its own.

    Raises:
        InputError: one of these makes no sense.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.Linear(3, 6))
        >>> bended, rank = bt.BendedModule(model), bt.analysis.Rank()
        >>> with bended.interject("1", rank):
        ...     for _ in range(4):
        ...         _ = bended(torch.randn(16, 8))
        >>> rank.results["sub_1"]["rank"]  # of the bias and three directions
        4
    """

    def __init__(
        self,
        mode: str = "aTa",
        *,
        centred: bool = False,
        keep: Keep = "units",
        rtol: float | None = None,
        atol: float = 0.0,
        max_samples: int = 8192,
        max_features: int = 16384,
        subset: int | None = None,
        seed: int = 0,
        per_pass: bool = False,
    ) -> None:
        super().__init__(per_pass=per_pass)
        if mode not in _MODES:
            raise InputError(f"mode is one of {', '.join(map(repr, _MODES))}, not {mode!r}")
        check_tolerances(rtol, atol)
        for name, number in (
            ("max_samples", max_samples), ("max_features", max_features), ("subset", subset),
        ):  # fmt: skip
            check_positive(name, number, or_none=name == "subset")
        self.mode = mode
        self.centred = centred
        self.keep = check_keep(keep)
        self.rtol = rtol
        self.atol = atol
        self.max_samples = max_samples
        self.max_features = max_features
        self.subset = subset
        self.seed = seed

    def start(self, key: str) -> Products | Rows:
        """Return sums of products, or rows that are kept."""
        return Products() if self.mode == "aTa" else Rows(self.max_samples)

    def update_state(self, state: Products | Rows, value: Tensor, batch: Batch) -> None:
        """Take in features."""
        rows = chosen_features(as_matrix(value, self.keep), self.subset, self.seed)
        if self.mode == "aTa":
            check_features(rows.shape[1], self.max_features, "subset=, or mode='aaT'")
        elif self.mode == "aaT":
            check_squares(rows)
        state.update(rows)

    def result(self, state: Products | Rows) -> dict[Any, Any]:
        """Return the rank, and what else follows from the singular values."""
        found = self._spectrum(state)
        return {
            "rank": found.rank,
            "normalized_rank": found.normalized_rank,
            "effective_rank": found.effective_rank,
            "stable_rank": found.stable_rank,
            "participation_ratio": found.participation_ratio,
            "samples": found.samples,
            "features": found.features,
        }

    @property
    def spectra(self) -> dict[str, Spectrum]:
        """The singular values, by node path."""
        return {path: self._spectrum(state) for path, state in self._states.items()}

    def _spectrum(self, state: Products | Rows) -> Spectrum:
        if isinstance(state, Products):
            return spectrum_of_products(state, centred=self.centred, rtol=self.rtol, atol=self.atol)
        rows = in_double(state.result())
        if self.mode == "a":
            return spectrum(
                rows, centred=self.centred, rtol=self.rtol, atol=self.atol, eps=state.eps
            )
        least = 0.0
        if self.centred and len(rows):
            mean = rows.mean(0)
            least = centring_error(rows.shape[0], rows.shape[1], mean)
            rows = rows - mean
        return spectrum_of_gram(
            rows @ rows.T,
            samples=rows.shape[0], features=rows.shape[1], eps=state.eps,
            rtol=self.rtol, atol=self.atol, least=least,
        )  # fmt: skip
