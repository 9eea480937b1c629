"""What clients import from `deep_gemm.utils`; everything here exists at top level too."""

from deep_gemm.utils import dist, layout, math
from deep_gemm.utils.dist import *  # noqa: F403
from deep_gemm.utils.layout import *  # noqa: F403
from deep_gemm.utils.math import *  # noqa: F403

__all__ = [*math.__all__, *layout.__all__, *dist.__all__]
