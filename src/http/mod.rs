//! HTTP: the edges, routing and answering. The only module that knows sockets.
pub mod edge;
