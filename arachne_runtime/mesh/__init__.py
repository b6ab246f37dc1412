"""From a plan to process groups: groups, peers, and the one total order of communication."""
