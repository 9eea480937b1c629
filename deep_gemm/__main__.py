"""`python -m deep_gemm` is the command `deep-gemm`."""

from deep_gemm.cli import main

main()
