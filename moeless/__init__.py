"""moeless: predict expert loads of Mixture-of-Experts models, and serve them with experts that scale on demand."""

__version__ = "0.1.0"
