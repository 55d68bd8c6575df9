"""Data sets and their split over clients: the seven of the papers, four with real clients, and the user's own."""

from shoal.data.arrays import from_arrays, from_clients
from shoal.data.dataset import Dataset
from shoal.data.load import load
from shoal.data.partitions import ListedPartition, Partition, partition

__all__ = ["Dataset", "ListedPartition", "Partition", "from_arrays", "from_clients", "load", "partition"]
