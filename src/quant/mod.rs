//! What bits mean and how they are chosen: mathematics on rows and columns.
