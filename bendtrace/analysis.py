"""Analysers: statistics of the values of nodes, in bounded memory.

>>> import torch, bendtrace as bt
>>> statistics = bt.analysis.FeatureStatistics(keep=-1)
>>> bended = bt.BendedModule(torch.nn.ReLU())
>>> with bended.interject("relu", statistics):
...     _ = bended(torch.tensor([[1.0, -2.0], [3.0, -4.0]]))
>>> statistics.to_dict()["relu"]["mean"]
[2.0, 0.0]
"""

from bendtrace.research.analyser import Analyser, Batch
from bendtrace.research.composed import AnalyserList, PerClassAnalyser, PerClassVersusAnalyser
from bendtrace.research.evaluation import AnalyserEvaluation, Evaluated
from bendtrace.research.features import (
    DeadReLU,
    FeatureStatistics,
    GradientAccumulation,
    GradientAnalyser,
    RunningCovariance,
    RunningHistogram,
    RunningMean,
    RunningMinMax,
    RunningQuantile,
    RunningTopK,
    RunningVariance,
    UnitAnalyser,
)
from bendtrace.research.probes import LinearProbe
from bendtrace.research.spectra import (
    CovarianceSpectrum,
    PowerLaw,
    Rank,
    Spectrum,
    power_law,
    spectrum,
)
from bendtrace.research.streaming import (
    Count,
    Covariance,
    Histogram,
    Mean,
    MinMax,
    Moments,
    Quantiles,
    Statistic,
    Tally,
    TopK,
    Variance,
)
from bendtrace.research.weights import LayerWeightRank, WeightRank, weight_ranks

__all__ = [
    "Analyser",
    "AnalyserEvaluation",
    "AnalyserList",
    "Batch",
    "Count",
    "Covariance",
    "CovarianceSpectrum",
    "DeadReLU",
    "Evaluated",
    "FeatureStatistics",
    "GradientAccumulation",
    "GradientAnalyser",
    "Histogram",
    "LayerWeightRank",
    "LinearProbe",
    "Mean",
    "MinMax",
    "Moments",
    "PerClassAnalyser",
    "PerClassVersusAnalyser",
    "PowerLaw",
    "Quantiles",
    "Rank",
    "RunningCovariance",
    "RunningHistogram",
    "RunningMean",
    "RunningMinMax",
    "RunningQuantile",
    "RunningTopK",
    "RunningVariance",
    "Spectrum",
    "Statistic",
    "Tally",
    "TopK",
    "UnitAnalyser",
    "Variance",
    "WeightRank",
    "power_law",
    "spectrum",
    "weight_ranks",
]
__dir__ = __all__.copy
