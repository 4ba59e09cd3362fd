"""Watch a foreign job of DistributedDataParallel: name its straggler, and where its time goes."""
