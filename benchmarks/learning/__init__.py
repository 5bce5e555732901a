"""What a drafter that learns from traffic gains, costs and withstands."""
