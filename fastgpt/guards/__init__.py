"""Guards of a run's numbers: losses and gradients that are not finite, and spikes."""
