"""Networks: registry, user-supplied models, validation, public weights, fixed features."""
