"""Load shapes: each walks one plan, stage by stage."""
