import createClient, { type Client } from "openapi-fetch";
import type { components, paths } from "./schema.js";

export type { components, operations, paths } from "./schema.js";

/** The messages by their names: `Schemas["TransferInfo"]`. */
export type Schemas = components["schemas"];

/**
 * The control plane at `url`, as in `https://server:7800`. Paths, parameters, bodies and answers
 * are typed by its document; each call gives `data`, or `error`, which is a problem document.
 */
export function controlPlane(url: string, token?: string): Client<paths> {
  const headers = token === undefined ? {} : { Authorization: `Bearer ${token}` };
  return createClient<paths>({ baseUrl: url, headers });
}
