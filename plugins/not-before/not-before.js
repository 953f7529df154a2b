// world: filter
//
// A filter: scheduled delivery. A message is held until the time in one of its fields: a
// number (milliseconds since 1970, or seconds if it is below 100,000,000,000) or a text in
// RFC 3339. What has no such field is delivered at once.
//
// Lanes are never reordered: a message waits behind a held one of its partition, so
// schedules that must not wait for each other belong into different partitions.
//
// Settings:
// - `field` (`notBefore`): its name; dots go down into objects.

let path = ["notBefore"];

// The payload's bytes are UTF-8, and there is no TextDecoder here.
const text = (bytes) => {
  let out = "";
  for (let i = 0; i < bytes.length; ) {
    const b = bytes[i++];
    if (b < 0x80) out += String.fromCharCode(b);
    else if (b < 0xe0) out += String.fromCharCode(((b & 31) << 6) | (bytes[i++] & 63));
    else if (b < 0xf0) out += String.fromCharCode(((b & 15) << 12) | ((bytes[i++] & 63) << 6) | (bytes[i++] & 63));
    else {
      const point = ((b & 7) << 18) | ((bytes[i++] & 63) << 12) | ((bytes[i++] & 63) << 6) | (bytes[i++] & 63);
      out += String.fromCodePoint(point);
    }
  }
  return out;
};

const due = (payload) => {
  let value;
  try {
    value = JSON.parse(text(payload));
  } catch {
    return undefined;
  }
  for (const name of path) value = value === null || typeof value !== "object" ? undefined : value[name];
  if (typeof value === "number") return value < 1e11 ? value * 1000 : value;
  if (typeof value === "string") {
    const time = Date.parse(value);
    return Number.isNaN(time) ? undefined : time;
  }
  return undefined;
};

export const messageFilter = {
  init(settings) {
    for (const [key, value] of settings) {
      if (key !== "field" || value === "") throw new Error(`not-before has the setting field, got ${key}=${value}`);
      path = value.split(".");
    }
  },

  filter(context, messages) {
    const now = Number(context.nowMs);
    return messages.map((message) => {
      const time = due(message.payload);
      if (time === undefined || time <= now) return { tag: "deliver" };
      // Longer holds are cut to an hour and asked for again.
      return { tag: "hold", val: Math.min(Math.ceil(time - now), 3600000) };
    });
  },
};
