//! Tables, JSON, progress: the only module that prints.
