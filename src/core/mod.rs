//! Core threads: all work of the data plane.
//!
//! Each core thread has one database connection and exclusive ownership of the
//! state that is hashed to it. A request goes to the core that owns it: a push by
//! (queue, partition), a pop by (queue, group), an ack to the core that gave out
//! its lease. No state is shared, so nothing is locked; cores talk through
//! crossbeam channels.
//!
//! A core drains and fuses: it takes everything that waits in its inbox and turns
//! each kind of request into one SQL call. Under no load that call carries one
//! request; under load everything that arrived during the previous commit shares
//! the next one.
