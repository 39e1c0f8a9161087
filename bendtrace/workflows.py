"""Research workflows: patching, tracing causes, ablation, steering, lenses.

>>> import torch, bendtrace as bt
>>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh())
>>> out, cache = bt.workflows.run_with_cache(model, torch.tensor([-1.0, 2.0]))
>>> cache["0.output"]
tensor([0., 2.])
"""

from bendtrace.debug.calls import Call
from bendtrace.insert.where import Alias, Aliases, transformer_lens_aliases
from bendtrace.log.entries import Table
from bendtrace.research.ablation import AblationStudy, ablate, ablation_study
from bendtrace.research.autoencoder import (
    LatentEdit,
    SparseAutoencoder,
    SplicedAutoencoder,
    load_autoencoder,
    splice_autoencoder,
)
from bendtrace.research.bending_sessions import BendingSession, Sweep, bending_session, sweep
from bendtrace.research.cache import ActivationCache, run_with_cache
from bendtrace.research.costs import Costs, cost, dead_ends, hot_path, recomputation
from bendtrace.research.debugging import NonFinite, Range, find_nan, gradient_flow, raise_on_nan
from bendtrace.research.facet_finder import Facet, Facets, facets
from bendtrace.research.lenses import (
    LensResult,
    ProbeData,
    RidgeProbe,
    TunedLens,
    fit_ridge,
    logit_lens,
    probe_data,
)
from bendtrace.research.patching import (
    Attribution,
    CausalTrace,
    NodeFunction,
    Patching,
    activation_patching,
    attribute,
    attribution_patching,
    causal_tracing,
    scan,
)
from bendtrace.research.paths import PathPatching, path_patching
from bendtrace.research.reach import Reach, ancestry, influence
from bendtrace.research.steering import Steering, SteeringVectors, steer, steering_vector

__all__ = [
    "AblationStudy",
    "ActivationCache",
    "Alias",
    "Aliases",
    "Attribution",
    "BendingSession",
    "Call",
    "CausalTrace",
    "Costs",
    "Facet",
    "Facets",
    "LatentEdit",
    "LensResult",
    "NodeFunction",
    "NonFinite",
    "Patching",
    "PathPatching",
    "ProbeData",
    "Range",
    "Reach",
    "RidgeProbe",
    "SparseAutoencoder",
    "SplicedAutoencoder",
    "Steering",
    "SteeringVectors",
    "Sweep",
    "Table",
    "TunedLens",
    "ablate",
    "ablation_study",
    "activation_patching",
    "ancestry",
    "attribute",
    "attribution_patching",
    "bending_session",
    "causal_tracing",
    "cost",
    "dead_ends",
    "facets",
    "find_nan",
    "fit_ridge",
    "gradient_flow",
    "hot_path",
    "influence",
    "load_autoencoder",
    "logit_lens",
    "path_patching",
    "probe_data",
    "raise_on_nan",
    "recomputation",
    "run_with_cache",
    "scan",
    "splice_autoencoder",
    "steer",
    "steering_vector",
    "sweep",
    "transformer_lens_aliases",
]
__dir__ = __all__.copy
