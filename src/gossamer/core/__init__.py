"""The types that every other package builds on: requests, buckets, parts, contracts, errors."""
