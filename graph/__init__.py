"""What the three tools share: the model graph, the cluster, the plan, drawing."""
