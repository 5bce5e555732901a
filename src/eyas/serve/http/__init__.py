"""HTTP below the routes: request bodies, and answers as documents or event streams."""
