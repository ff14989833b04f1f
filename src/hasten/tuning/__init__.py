"""The tuner: tries what could pay, keeps what is proven, believes only fresh seeds. See README.md."""
