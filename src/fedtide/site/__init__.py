"""Programs of a deployment: a node that is connected, its worker, and a study as an app for Flower."""
