//! A transaction: pushes and acks that take effect together or not at all.

use serde::Deserialize;
use serde_json::value::RawValue;
use uuid::Uuid;

use super::ack::{self, AckItem, group_of};
use super::error::ApiError;
use super::push::{self, Building, PushRequest, bad_body};

/// Most operations, pushed items counted one by one.
pub const MAX_OPERATIONS: usize = 10_000;

/// A parsed transaction.
pub struct TransactionRequest {
    /// Everything it pushes; the items' indices are those of the results.
    pub push: PushRequest,
    /// Its acks: index of the result, group, what is said.
    pub acks: Vec<(usize, String, AckItem)>,
    /// Results to give.
    pub results: usize,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Body<'a> {
    #[serde(borrow)]
    operations: Option<Vec<&'a RawValue>>,
    required_leases: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct Operation<'a> {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(borrow)]
    items: Option<Vec<push::Item<'a>>>,
}

/// Parses the body of `POST /api/v1/transaction`.
pub fn parse(body: &[u8], producer_sub: Option<&str>) -> Result<TransactionRequest, ApiError> {
    let text = std::str::from_utf8(body).map_err(bad_body)?;
    let body: Body<'_> = serde_json::from_str(text).map_err(bad_body)?;
    let Some(operations) = body.operations else {
        return Err(ApiError::bad_request("transaction requires an operations array"));
    };
    // The lease of the acks that name none, if there is exactly one.
    let leases = body.required_leases.unwrap_or_default();
    let only_lease = match leases.as_slice() {
        [lease] => Some(lease.as_str()),
        _ => None,
    };
    let (mut building, mut acks, mut index) = (Building::default(), Vec::new(), 0);
    for raw in operations {
        let operation: Operation<'_> = serde_json::from_str(raw.get()).map_err(bad_body)?;
        match operation.kind.as_deref() {
            Some("push") => {
                let items = match operation.items {
                    Some(items) => items,
                    None => vec![serde_json::from_str(raw.get()).map_err(bad_body)?],
                };
                for item in items {
                    building.add(index, item, producer_sub)?;
                    index += 1;
                }
            }
            Some("ack") => {
                let item: ack::Item<'_> = serde_json::from_str(raw.get()).map_err(bad_body)?;
                let group = group_of(item.consumer_group.as_deref())?;
                let mut item = item.check(index)?;
                if item.lease_id.is_none()
                    && item.refused.is_none()
                    && let Some(lease) = only_lease
                {
                    match Uuid::parse_str(lease) {
                        Ok(lease) => item.lease_id = Some(lease),
                        Err(_) => item.refused = Some(ack::INVALID_LEASE.to_owned()),
                    }
                }
                acks.push((index, group, item));
                index += 1;
            }
            _ => {
                return Err(ApiError::bad_request(
                    "segments transaction supports only push and ack operations",
                ));
            }
        }
        if index > MAX_OPERATIONS {
            return Err(bad_body(format_args!("more than {MAX_OPERATIONS} operations")));
        }
    }
    Ok(TransactionRequest { push: building.finish(), acks, results: index })
}
