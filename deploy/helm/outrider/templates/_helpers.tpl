{{- define "outrider.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* The labels that select pods: of a role where `role` is given. */}}
{{- define "outrider.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .role }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{- define "outrider.labels" -}}
{{ include "outrider.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: outrider
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* All components: the roles, and a second drafter. */}}
{{- define "outrider.components" -}}
["orchestrator", "verifier", "drafter", "drafter-2", "retrieval"]
{{- end -}}

{{/* `common` with the component's own section over it, as JSON; the second drafter has the first one's between. */}}
{{- define "outrider.role" -}}
{{- $under := deepCopy .root.Values.common -}}
{{- if eq .role "drafter-2" -}}
{{- $under = mergeOverwrite $under (deepCopy .root.Values.drafter) -}}
{{- end -}}
{{- mergeOverwrite $under (deepCopy (index .root.Values .role)) | toJson -}}
{{- end -}}

{{- define "outrider.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "outrider.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "outrider.isStateful" -}}
{{- if ne . "orchestrator" }}true{{ end -}}
{{- end -}}

{{/* What scales a role: kind and name. */}}
{{- define "outrider.workload" -}}
apiVersion: apps/v1
kind: {{ if include "outrider.isStateful" .role }}StatefulSet{{ else }}Deployment{{ end }}
name: {{ include "outrider.fullname" .root }}-{{ .role }}
{{- end -}}

{{/* Every pod of these roles, by the name of their headless service. */}}
{{- define "outrider.peers" -}}
{{- $peers := list -}}
{{- range $role := .roles -}}
{{- $own := include "outrider.role" (dict "root" $.root "role" $role) | fromJson -}}
{{- if $own.enabled -}}
{{- $peers = append $peers (printf "dns:%s-%s:%v" (include "outrider.fullname" $.root) $role $.root.Values.ports.grpc) -}}
{{- end -}}
{{- end -}}
{{- join "," $peers -}}
{{- end -}}

{{- define "outrider.weightsClaim" -}}
{{- if .Values.weights.existingClaim -}}
{{- .Values.weights.existingClaim -}}
{{- else if .Values.weights.size -}}
{{- include "outrider.fullname" . }}-weights
{{- end -}}
{{- end -}}

{{- define "outrider.probe" -}}
httpGet: {path: {{ .path }}, port: metrics}
{{- range $key, $value := .probe }}
{{ $key }}: {{ $value }}
{{- end }}
{{- end -}}

{{/* A role's image. */}}
{{- define "outrider.image" -}}
"{{ with .own.image.registry }}{{ . }}/{{ end }}{{ .own.image.repository }}:{{ default .root.Chart.AppVersion .own.image.tag }}"
{{- end -}}
