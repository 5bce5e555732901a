"""`eyas export`: writes drafters in the forms that other engines read."""
