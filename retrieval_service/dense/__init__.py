"""Dense references: documents found by what they are about, and copied from (LLMA, Yang et al., arXiv 2304.04487)."""
