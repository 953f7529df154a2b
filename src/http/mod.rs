//! HTTP: the edges, and the routes above them.
pub mod admin;
pub mod edge;
pub mod groups;
pub mod operations;
pub mod plugins;
pub mod router;
pub mod transaction;
