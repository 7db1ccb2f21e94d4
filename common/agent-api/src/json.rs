//! Fields whose types serde does not know.

use protobuf::{Enum, EnumOrUnknown, MessageField};
use serde::{Serialize, Serializer};

/// An enum is its number, known or not.
pub(crate) fn number<E: Enum, S: Serializer>(field: &EnumOrUnknown<E>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_i32(field.value())
}

/// A message that is not set is null.
pub(crate) fn message<M: Serialize, S: Serializer>(field: &MessageField<M>, serializer: S) -> Result<S::Ok, S::Error> {
    field.as_ref().serialize(serializer)
}
