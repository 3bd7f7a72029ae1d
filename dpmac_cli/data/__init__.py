"""Datasets: registry, schema, loaders for torchvision, image folders and arrays, augmentation."""
