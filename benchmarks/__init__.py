"""Tables of speed. Only ratios within one run count: machines are shared and noisy."""
